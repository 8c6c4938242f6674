"""OpenAI's API over one model on every rank: `server.serve(path)`, or `drumline serve`."""
