"""Continuous batching: requests of different lengths served together on one device.

`engine.py` is the engine. `scheduler.py` plans steps from lengths and pages, `step_loop.py` carries
them out, `served_rows.py` opens the model's cache, `memory_view.py` has the requests' sequences in
it, `runner.py` and `sampler.py` run the model and choose tokens. `async_engine.py` (a thread) and
`process/` serve an event loop; both share `engine_loop.py` and `engine_client.py`. `start.py`
begins before torch is imported.
"""
