"""Chat trajectories from files into a store: OpenAI messages and ATIF, as JSON lines or documents."""
