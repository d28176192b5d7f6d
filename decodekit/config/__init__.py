"""From names and settings to dataclasses and components; the only place that imports Hydra."""
