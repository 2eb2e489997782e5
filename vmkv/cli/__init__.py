"""The command `vmkv`: doctor, plan, pool, serve, top.

Each command is a module with `add_parser` and a `run` that writes to a given file and returns an
exit status. Heavy modules (torch, transformers, fastapi) are imported when a command runs.
"""
