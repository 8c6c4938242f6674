"""The answers of the server: text as it comes, log-probabilities, chunks of a stream, errors."""
