"""Sharing between processes: another process maps the extents of a prefix, without a copy.

`protocol.py` defines the messages, `offer.py` their contents; `exporter.py` is the side that owns
the memory, `importer.py` the side that maps it.
"""

from .exporter import PrefixExporter as PrefixExporter
from .importer import import_prefix as import_prefix
from .protocol import Peer as Peer
