"""Strategies, one file each: proposers that guess token trees."""
