"""Engines of others as members of a broker: their paged caches over mapped memory.

See DESIGN.md, Note [Engines of others are members].
"""
