"""Events of the prefix cache: what it holds now and what no more, published for routers as vLLM publishes them."""
