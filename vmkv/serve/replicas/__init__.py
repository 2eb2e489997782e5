"""Several engines that serve one model, as a deployment of Ray Serve.

`prefixes.py` summarises a replica's prefix index; `choice.py` chooses the replica of a request;
`metrics.py` merges the replicas' metrics. With Ray (the extra `vmkv[ray]`): `router.py` applies the
choice in Ray's router; `replica.py` runs an engine; `client.py` presents all replicas as one
engine; `deployment.py` has applications for Ray Serve, and runs `vmkv serve --replicas`.
"""
