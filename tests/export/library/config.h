/* What an application may say to all sources of a step. */
extern int nodes_seen[];
#define PM_NODE(node) ((void)nodes_seen[node]++)
