"""OpenAI's API over one model on every rank: `http_server.serve(path)`, or `drumline serve`."""
