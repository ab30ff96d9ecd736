"""What executes a hop. One module a backend; `base` says what a backend is."""
