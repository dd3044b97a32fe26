-- The database of a lab as fulltilt wrote it before there were migrations (schema and rows of a recorded lab).
BEGIN TRANSACTION;
CREATE TABLE attempt (
	experiment INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	node TEXT NOT NULL, 
	devices JSON NOT NULL, 
	n_threads INTEGER, 
	pid INTEGER, 
	started_s FLOAT NOT NULL, 
	ended_s FLOAT, 
	outcome TEXT, 
	reason TEXT, 
	metrics JSON, 
	PRIMARY KEY (experiment, number), 
	FOREIGN KEY(experiment) REFERENCES experiment (id)
);
INSERT INTO "attempt" VALUES(1,1,'n','["cpu:0"]',1,7,1.79565523583503055572e+09,1.0,'succeeded',NULL,'{"accuracy": 0.75}');
INSERT INTO "attempt" VALUES(2,1,'n','["cpu:0"]',1,8,1.79565523585065054896e+09,NULL,'lost','its scheduler was gone',NULL);
CREATE TABLE event (
	seq INTEGER NOT NULL, 
	experiment INTEGER NOT NULL, 
	attempt INTEGER NOT NULL, 
	arrow TEXT NOT NULL, 
	state TEXT NOT NULL, 
	time_s FLOAT NOT NULL, 
	PRIMARY KEY (seq), 
	FOREIGN KEY(experiment) REFERENCES experiment (id)
);
INSERT INTO "event" VALUES(1,1,0,'submit','queued',1.79565523582220935815e+09);
INSERT INTO "event" VALUES(2,2,0,'submit','queued',1.79565523582221031181e+09);
INSERT INTO "event" VALUES(3,1,1,'lease','leased',1.79565523583471870427e+09);
INSERT INTO "event" VALUES(4,1,1,'start','running',1.79565523583930683132e+09);
INSERT INTO "event" VALUES(5,1,1,'finish','finalizing',1.79565523584280705457e+09);
INSERT INTO "event" VALUES(6,1,1,'commit','succeeded',1.79565523584662151343e+09);
INSERT INTO "event" VALUES(7,2,1,'lease','leased',1.79565523585058093073e+09);
INSERT INTO "event" VALUES(8,2,1,'start','running',1.79565523585467696184e+09);
INSERT INTO "event" VALUES(9,2,1,'requeue','queued',1.7956552358555927277e+09);
CREATE TABLE experiment (
	id INTEGER NOT NULL, 
	sweep TEXT NOT NULL, 
	digest TEXT NOT NULL, 
	point JSON NOT NULL, 
	overrides JSON NOT NULL, 
	config JSON NOT NULL, 
	priority INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	attempt INTEGER NOT NULL, 
	created_s FLOAT NOT NULL, 
	PRIMARY KEY (id), 
	UNIQUE (sweep, digest), 
	FOREIGN KEY(sweep) REFERENCES sweep (name)
);
INSERT INTO "experiment" VALUES(1,'grid','d1','{"optim.lr": 1}','["epochs=1"]','{"optim": {"lr": 1}}',0,'succeeded',1,1.7956552358209347725e+09);
INSERT INTO "experiment" VALUES(2,'grid','d2','{"optim.lr": 2}','["epochs=1"]','{"optim": {"lr": 2}}',0,'queued',1,1.7956552358209347725e+09);
CREATE TABLE sweep (
	name TEXT NOT NULL, 
	source TEXT NOT NULL, 
	created_s FLOAT NOT NULL, 
	PRIMARY KEY (name), 
	UNIQUE (source)
);
INSERT INTO "sweep" VALUES('grid','/somewhere/grid.yaml',1.79565523581701087948e+09);
CREATE INDEX ix_experiment_state ON experiment (state);
COMMIT;
