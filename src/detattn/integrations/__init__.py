"""Hooks into other libraries, one module each; nothing here is imported by ``import detattn``."""
