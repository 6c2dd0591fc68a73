"""Charts of simulations: what memory is made of, rooflines, scaling, accuracy, the front of a sweep."""
