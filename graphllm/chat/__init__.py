"""What a request of every API becomes, a call, and what the model's text means in return."""
