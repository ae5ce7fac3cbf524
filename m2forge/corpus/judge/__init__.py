"""Scores, classifies and deduplicates documents.

In reading order: words, feature, quality, classifier, topic, signature, duplicate; example trains the classifiers,
scan runs all of it.
"""
