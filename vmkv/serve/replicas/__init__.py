"""Several engines that serve one model, as a deployment of Ray Serve.

`prefixes.py` what a replica tells of its prefix index; `choice.py` who gets a request, as pure
logic; `metrics.py` one page of what all have counted. With Ray, which is the extra `vmkv[ray]`:
`router.py` that choice in Ray's router; `replica.py` an engine in a replica; `client.py` all of
them, asked as one engine is, which is what the server asks; `deployment.py` applications for
whoever uses Ray Serve; `local.py` what `vmkv serve --replicas` runs.
"""
