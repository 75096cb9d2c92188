"""An artifact becomes a running core, in stages: `load_core` has verify and place, a loader of `loaders/` has weights,
executor and core. `CoreStart` goes from stage to stage.

Only `rank` and what `loaders/` needs import torch; the other files must start without it.
"""
