"""INT8 products: rows and weights as codes with scales, and the forms of the integer product on each device."""
