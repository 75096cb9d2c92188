from plugin_op.op import squared_relu

__all__ = ["squared_relu"]
