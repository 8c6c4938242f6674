"""Contact with transformers: one module imports it, and the others here are verbs built on that."""
