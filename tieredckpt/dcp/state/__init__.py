"""What a state dict is made of: items, values, what each rank has, plans."""
