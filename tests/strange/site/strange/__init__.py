"""An outside package with a family of models that share nothing but their contract with those of graphllm. The
config.json of a checkpoint says which of its features it has.

recurrent: two recurrent states of unlike dtypes. latent: int8 latents with scales, keys of one size and values of
another. window: a sliding window. cross: attention over an encoder's rows. image: an encoder's rows in place of token
embeddings. axes: positions [3, T]. adapter: a table that is written while serving. extern: a routine with two results.
encoded: weights in block_int8, of another package.
"""

from strange import model  # noqa: F401
