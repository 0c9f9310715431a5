"""Processes and people: flags, ranks, requests, time."""
