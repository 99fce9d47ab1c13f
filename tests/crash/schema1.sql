PRAGMA journal_mode = wal;
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE namespaces(
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, present INTEGER NOT NULL, made INTEGER NOT NULL,
    mode INTEGER NOT NULL,
    uid INTEGER NOT NULL, gid INTEGER NOT NULL, atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL, ttl_ms INTEGER);
CREATE TABLE keys(
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL DEFAULT 0,
    finished INTEGER NOT NULL DEFAULT 0, pruned INTEGER NOT NULL DEFAULT 0);
CREATE TABLE attempts(
    key_id INTEGER NOT NULL, epoch INTEGER NOT NULL,
    pid INTEGER NOT NULL, start_time INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    command TEXT NOT NULL, opener_pid INTEGER NOT NULL, opener_start INTEGER NOT NULL,
    locker_pid INTEGER NOT NULL, locker_start INTEGER NOT NULL,
    via TEXT NOT NULL, since_ms INTEGER NOT NULL, renewed_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL, deadline_ns INTEGER NOT NULL, handle INTEGER NOT NULL, owner INTEGER,
    req_unique INTEGER NOT NULL, note TEXT NOT NULL, held INTEGER NOT NULL, registered INTEGER NOT NULL,
    outcome TEXT, reason TEXT, ended_ms INTEGER, result_size INTEGER, result_ms INTEGER,
    PRIMARY KEY(key_id, epoch)) WITHOUT ROWID;
CREATE INDEX committed ON attempts(key_id, epoch) WHERE result_ms IS NOT NULL;
PRAGMA application_id = 1281712499;
PRAGMA user_version = 1;
INSERT INTO namespaces VALUES (1, '', 1, 1, 448, 0, 0, 0, 0, 0, NULL);
INSERT INTO keys(id, path, epoch) VALUES (1, 'old', 5);
WITH RECURSIVE epochs(epoch) AS (SELECT 1 UNION ALL SELECT epoch + 1 FROM epochs WHERE epoch < 5)
INSERT INTO attempts(key_id, epoch, pid, start_time, uid, gid, command, opener_pid, opener_start, locker_pid, locker_start,
    via, since_ms, renewed_ms, expires_ms, ttl_ms, deadline_ns, handle, owner, req_unique, note, held, registered,
    outcome, reason, ended_ms)
SELECT 1, epoch, 100 + epoch, 1, 0, 0, 'old', 100 + epoch, 1, 0, 0, 'create', 1000 * epoch, 1000 * epoch,
    1000 * epoch + 86400000, 86400000, 1, epoch, NULL, 1, '', 0, epoch = 5, 'released', 'closed', 1000 * epoch + 500
FROM epochs;
