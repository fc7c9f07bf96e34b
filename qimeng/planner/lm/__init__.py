"""The language-model planner: it reads the state as text and scores the text of each legal action.

`reading` turns a state into token ids, `scoring` turns these into policy and value, `mini` is the model that we
train from scratch, `weights` keeps any of them in a folder, `policy` is what stable-baselines3 needs, `training` trains
it, `planner` chooses with it. Importing this package loads nothing; its modules load torch and transformers, and
`policy` and `training` stable-baselines3 as well.
"""
