"""Shortest chain of acquaintances in the graph of friends."""

import csv

edges = {}
with open("friends.csv") as stream:
    for left, right in csv.reader(stream):
        edges.setdefault(left, []).insert(0, right)
        edges.setdefault(right, []).insert(0, left)

queue, seen = [["ann"]], {"ann"}
while queue:
    path = queue.pop()
    if path[-1] == "eve":
        print(" -> ".join(path))
        break
    for friend in sorted(edges[path[-1]], reverse=True):
        if friend not in seen:
            seen.add(friend)
            queue.append([*path, friend])
