"""Shared by tests; a package, so that no installed `helpers` is found before it."""
