"""From ATen operators to loop nests: one file a kind of operator."""
