"""Lifted networks inside other libraries; each module needs its own host, and none needs another."""
