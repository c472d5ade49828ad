"""Model references to local folders, and the weights and heads inside them."""
