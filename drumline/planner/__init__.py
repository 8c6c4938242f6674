"""The device of each layer: by memory, by measured speed, or by the user's map."""
