"""Routing, experts and mixture layers as modules that train, and the pure rules that the target shares with them."""
