"""Index scores: how much a query wants each compressed position."""
