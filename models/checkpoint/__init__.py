"""The official checkpoint layout: names, shapes, scales, shards."""
