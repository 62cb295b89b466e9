"""Who owns which part of the vector, and what an encoded result looks like."""
