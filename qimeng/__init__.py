"""qimeng: GPU kernels by macro thinking and micro coding."""
