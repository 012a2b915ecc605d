"""Real worker processes without Ray, and a router in the test's own process."""
