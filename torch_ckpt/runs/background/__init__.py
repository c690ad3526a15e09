"""Background saves of a run: by a thread of this process, or by the agent."""
