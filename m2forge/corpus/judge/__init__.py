"""Scores, classifies and deduplicates documents.

In reading order: words, feature, quality, classifier, topic, duplicate; example trains the classifiers, scan
runs all of it.
"""
