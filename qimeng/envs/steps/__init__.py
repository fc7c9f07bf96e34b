"""The step loop: a task, the session that writes, verifies and rolls back, and the result."""
