"""The template coder's families, a folder each: matching, schedules, moves, printing."""
