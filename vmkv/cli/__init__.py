"""The command `vmkv`: doctor, plan, bench, serve, top.

Each command is a module with `add_parser` and a `run` that writes to what it is given and returns
an exit status. What is heavy (torch, transformers, fastapi) is imported when a command runs.
"""
