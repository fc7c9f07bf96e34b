"""Training of the language model behind an LLM coder: supervised fine-tuning, then multi-turn reinforcement learning.

The formulas: `rewards` (what a turn is worth), `advantages` (beside other answers to the same request), `mismatch`
(whether sampler and trainer agree), `policy_loss`. The model: `weights` (pretrained, or tiny), `conversations` (texts
as tokens, packed), `sft`, `sampling`, `rollout` (turns with the gates' messages), `rl`.

A trained model is a folder, which `coder="local:FOLDER"` uses. Importing this loads no model.
"""
