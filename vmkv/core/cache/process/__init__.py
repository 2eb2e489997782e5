"""Sharing between processes: the extents of a prefix, read by whoever may, without a copy.

`protocol.py` what is said over the socket; `offer.py` what a prefix consists of; `exporter.py`
the side whose memory it is; `importer.py` the side that maps it.
"""

from .exporter import PrefixExporter as PrefixExporter
from .importer import import_prefix as import_prefix
from .protocol import Peer as Peer
