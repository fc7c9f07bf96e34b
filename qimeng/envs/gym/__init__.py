"""The Gymnasium environment: observation, rewards, wrappers."""
