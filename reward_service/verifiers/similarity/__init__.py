"""`similarity`: how close the completion is to references, by n-grams and edits."""
