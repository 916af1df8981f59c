"""Other libraries on the same work, for the benchmark only; the library never imports this."""
