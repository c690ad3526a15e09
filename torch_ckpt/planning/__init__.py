"""Save and load planners, and the native item tables that they use."""
