"""Saves of a run in the background: by a thread of this process, or by the agent."""
