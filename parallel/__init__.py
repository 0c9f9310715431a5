"""Who is who: ranks into coordinates, coordinates into owners, and the groups made from them."""
