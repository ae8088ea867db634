"""What a kernel is given: case families, inputs of a real model, and the schedules by name."""
