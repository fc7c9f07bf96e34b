"""The gates of an evaluation: one pipeline for every judge, and the gates that a judge's list is made of."""
