"""verl: a checkpoint manager for its FSDP workers, and the files that its own manager writes."""
